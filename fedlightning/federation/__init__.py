"""What travels between the server and its clients, and who does what with it."""
