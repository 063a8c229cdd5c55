"""One device for many users: a server that owns it, and the device of kind ``remote`` that uses it over the network.

`keys` has the users' keys, `connections` messages and the two ends of a connection, `instrument` the served device,
`sessions` and `server` the server and its turns, `remote` the client, `journal` the record of use.
"""
