"""How a step gets its gradient: differences of losses, tangents along directions, or exactly."""
