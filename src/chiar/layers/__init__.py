"""The parts of a CHIAR-Former layer; `block` puts them together."""
