"""Load data sets, split them into parts that never mix, and draw batches from them."""

from training.data.arrays import from_arrays as from_arrays
from training.data.catalogue import load_dataset as load_dataset
from training.data.dataset import Dataset as Dataset
from training.data.dataset import Split as Split
