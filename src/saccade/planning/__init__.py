"""What a step of a recipe takes, told before anything is loaded."""
