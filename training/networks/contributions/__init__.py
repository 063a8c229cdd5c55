"""What the records of a batch add to the gradients of parameters: their norms, and weighted sums of them.

A contribution is a list of *uses* of parameters. Closed-form networks make them from their signals and inputs, a
`RecordTape` from what it records of any module; both measure, clip and sum them here.
"""
