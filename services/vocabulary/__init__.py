"""Translation between the vocabularies of a target and a draft model, by the bytes of their tokens."""
