"""The API page of a server at `/docs`: Swagger UI, served without another host."""
