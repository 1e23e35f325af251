"""The engine: schedule, forward, sample. Knows nothing of actors and imports no trio."""
