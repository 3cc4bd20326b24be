"""Support for trainers that need more than the backend of torch.compile; their libraries are imported when used."""
