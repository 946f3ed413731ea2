"""The QEMU plugin that counts vector-state traffic from outside the guest, and its arguments."""
