"""From tensors to handles and back."""
