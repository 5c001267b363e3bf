package dev.lesonnx.app

import android.content.ContentResolver
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.DocumentsContract.Document
import dev.lesonnx.store.BundleSource
import dev.lesonnx.store.SourceFile
import java.io.FileNotFoundException
import java.io.InputStream

/** A folder that the system's picker gave, of any document provider. */
class DocumentTreeSource(private val resolver: ContentResolver, private val tree: Uri) : BundleSource {
    override suspend fun files(visit: suspend (SourceFile) -> Unit) = walk(DocumentsContract.getTreeDocumentId(tree), "", visit)

    private suspend fun walk(folder: String, prefix: String, visit: suspend (SourceFile) -> Unit) {
        for (child in children(folder)) {
            if (child.isFolder) {
                walk(child.id, "$prefix${child.name}/", visit)
            } else {
                visit(SourceFile(prefix + child.name) { open(child.id) })
            }
        }
    }

    private fun children(folder: String): List<Child> {
        val uri = DocumentsContract.buildChildDocumentsUriUsingTree(tree, folder)
        val cursor = resolver.query(uri, COLUMNS, null, null, null) ?: throw FileNotFoundException("the folder cannot be listed")
        return cursor.use {
            generateSequence { if (it.moveToNext()) Child(it.getString(0), it.getString(1), it.getString(2)) else null }.toList()
        }
    }

    private fun open(document: String): InputStream {
        val uri = DocumentsContract.buildDocumentUriUsingTree(tree, document)
        return resolver.openInputStream(uri) ?: throw FileNotFoundException("$document: cannot be opened")
    }

    private class Child(val id: String, val name: String, type: String) {
        val isFolder = type == Document.MIME_TYPE_DIR
    }

    companion object {
        private val COLUMNS = arrayOf(Document.COLUMN_DOCUMENT_ID, Document.COLUMN_DISPLAY_NAME, Document.COLUMN_MIME_TYPE)

        /** What a picked folder or file is called. */
        fun nameOf(resolver: ContentResolver, document: Uri): String? =
            resolver.query(document, arrayOf(Document.COLUMN_DISPLAY_NAME), null, null, null)?.use {
                if (it.moveToFirst()) it.getString(0) else null
            }
    }
}
