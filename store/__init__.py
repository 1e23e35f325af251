"""What lasts. Knows nothing of actors."""
