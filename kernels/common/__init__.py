"""Code that several ops share: chunked autograd, kernel launches, loads in Triton, checks and example inputs."""
