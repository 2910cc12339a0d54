"""The documents as programs: what their code blocks are (`blocks`), and how they are run (`running`)."""
