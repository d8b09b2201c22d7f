"""Training and evaluation of the pair that ships with gammaray; see services/demo_pair/MODEL_CARD.md."""
