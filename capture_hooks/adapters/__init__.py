"""What is hooked in which library or engine, and what it means."""
