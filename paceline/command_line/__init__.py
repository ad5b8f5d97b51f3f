"""Commands whose options are the fields of a frozen dataclass: parsing and help."""
