"""The account of a job: what every second of each of its processes was, from their events."""
