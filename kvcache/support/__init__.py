"""The ground of every room: arguments, tensors of other libraries, files, memory of the system."""
