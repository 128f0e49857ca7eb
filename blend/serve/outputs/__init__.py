"""From the engine's tokens to what clients see."""
