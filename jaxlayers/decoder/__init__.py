"""What a layer is, and the stack of them."""
