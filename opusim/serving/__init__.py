"""One device for many users: a server that owns it, and the device of kind ``remote`` that uses it over the network.

`keys` holds who may use it, `messages` what is exchanged, `turns` whose turn it is, `instrument` what is served,
`connections` the two ends of a connection, `sessions` and `server` the server, `remote` the client, `journal` who used
how much.
"""
