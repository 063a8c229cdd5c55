"""One device for many users: a server that owns it, and the device of kind ``remote`` that uses it over the network.

`keys` holds who may use it, `connections` messages and the two ends of a connection, `instrument` what is served,
`sessions` and `server` the server and whose turn it is, `remote` the client, `journal` who used how much.
"""
