"""Load data sets, split them into parts that never mix, and draw batches from them."""

from opusim.training.data.arrays import from_arrays as from_arrays
from opusim.training.data.catalogue import load_dataset as load_dataset
from opusim.training.data.dataset import Dataset as Dataset
from opusim.training.data.dataset import Split as Split
