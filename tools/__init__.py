"""What makes and checks the installation: lock files, a bill of materials, a look for known vulnerabilities."""
