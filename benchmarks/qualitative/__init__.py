"""Pictures of predictions, attention maps and learned prompts."""
