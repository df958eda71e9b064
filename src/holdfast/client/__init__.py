"""The plane over the network, behind the very same handles as the embedded one."""
