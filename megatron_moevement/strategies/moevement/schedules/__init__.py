"""Window schedules: who knows them, and how a job comes to another one."""
