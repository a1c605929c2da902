"""Tools that make and check the installation: lock files, a bill of materials, a look for known vulnerabilities."""
