"""The whole path on embedded data, for a first look."""
