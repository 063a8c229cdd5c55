"""What does somebody who sees every update learn about a record? Attacks on runs, and the games that score them."""
