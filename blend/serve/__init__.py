"""The server: requests, scheduler, documents and tenants. `blend.serve.http` holds its HTTP side."""
