"""The commands of `tandem`, by what they are about; importing a module registers its commands."""
