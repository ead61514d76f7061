"""What a choice costs: count (pure, no time), then price. Every quantity is a number or an array of numbers."""
