"""What trainers of other libraries need beside the backend of torch.compile. A library is imported where it is used."""
