"""What states cost and where they are found again, at the sizes of real models, with real schedulers and pools."""
