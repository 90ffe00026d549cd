"""One suite for every kind of store: what they must do, what they must refuse, and how they compare with PyTorch's."""
