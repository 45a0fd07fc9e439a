"""State of a service since ingestion: events, the catalogue, users and the numbers of new ids, embedded or in PostgreSQL."""
