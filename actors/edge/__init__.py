"""HTTP, SSE and websocket: the door."""
