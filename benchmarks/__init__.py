"""What is measured beside the library and the lab: each file or package says how it is called."""
