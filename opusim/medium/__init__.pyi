from .transmission import Medium as Medium

OUTPUTS_PER_BLOCK: int
