"""Pictures of what methods answer, where their image towers look, and what their prompts have become."""
