"""Material for tests: tiny models, the seeded world simulator, fork server, leak checks."""
