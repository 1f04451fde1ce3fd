"""Files of data sets, read without torch: IDX and MNIST."""
