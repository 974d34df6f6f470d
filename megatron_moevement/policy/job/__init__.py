"""The job: its ranks and operators, its stages and what crosses their boundaries."""
