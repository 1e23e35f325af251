"""What each actor does. Knows nothing of processes; read `protocol.py` first."""
