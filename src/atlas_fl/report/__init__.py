"""Tables and figures from run folders; importing this package draws nothing and loads no plotting library."""
