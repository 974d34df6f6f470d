"""The explorer: draws whole jobs and what happens to them, runs them, and judges them."""
