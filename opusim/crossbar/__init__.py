"""What do programmable analog devices do? Crossbars of memory devices, and layers whose product runs on one."""
