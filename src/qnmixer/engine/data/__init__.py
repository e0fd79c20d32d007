"""CT slices in Hounsfield units from many sources, as one dataset and one LightningDataModule."""
