"""Floor 4: one file per technique; each reads as its paper does."""
