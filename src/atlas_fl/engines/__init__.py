"""Where clients compute."""
