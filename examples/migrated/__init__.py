"""One training script of each of EasyDeL, fairseq2 and VeOmni, as it looks here. `docs/migrating.md` shows both forms."""
