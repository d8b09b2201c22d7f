{{/* JSON list of the models to download from the hub: neither the demo pair, directories nor early exits. */}}
{{- define "gammaray.hubModels" -}}
{{- $models := list -}}
{{- $names := list .Values.models.target -}}
{{- if ne (toString .Values.draft.workers) "0" -}}
{{- $names = append $names .Values.models.draft -}}
{{- end -}}
{{- range uniq $names -}}
{{- if not (or (eq . "demo") (hasPrefix "/" .) (hasPrefix "." .) (hasPrefix "early-exit:" .)) -}}
{{- $models = append $models . -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* "true" if a Job downloads models into the shared cache before other pods start. */}}
{{- define "gammaray.downloads" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.download.enabled (include "gammaray.hubModels" . | fromJsonArray) -}}
true
{{- end -}}
{{- end -}}

{{/* Path of the file that marks the download of these models as complete. */}}
{{- define "gammaray.modelsMark" -}}
/models/ready/{{ include "gammaray.hubModels" . | sha256sum | trunc 16 }}
{{- end -}}

{{/* Init container of a Ray pod that waits for that file: (dict "root" $ "component" name "image" reference). */}}
{{- define "gammaray.waitForModels" -}}
- name: wait-for-models
  {{- /* With the resources of the pod's container, which no limit range rejects, and without GPUs. */}}
  {{- include "gammaray.container" (omit . "gpus") | nindent 2 }}
  command:
    - timeout
    - {{ .root.Values.modelCache.download.timeoutSeconds | int64 | quote }}
    - sh
    - -c
    - until [ -e "$0" ]; do sleep 2; done
    - {{ include "gammaray.modelsMark" .root }}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end -}}

{{/* The pod that downloads models. */}}
{{- define "gammaray.downloadPod" -}}
{{- $pod := dict "root" . "component" "models" "user" 1000 "image" (include "gammaray.image" (dict "root" . "name" "orchestrator")) -}}
{{- $values := include "gammaray.podValues" $pod | fromYaml -}}
metadata: {{- include "gammaray.podMetadata" $pod | nindent 2 }}
spec:
  restartPolicy: OnFailure
  {{- include "gammaray.podSpec" $pod | nindent 2 }}
  containers:
    - name: download
      {{- include "gammaray.container" $pod | nindent 6 }}
      command:
        - python
        - -c
        - {{ .Files.Get "files/download_models.py" | quote }}
        - {{ include "gammaray.modelsMark" . }}
        {{- range include "gammaray.hubModels" . | fromJsonArray }}
        - {{ . | quote }}
        {{- end }}
      env: {{- include "gammaray.env" (dict "own" (include "gammaray.downloadEnv" .) "values" $values) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
        {{- with $values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "gammaray.modelsClaim" . | quote }}
    {{- with $values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "gammaray.downloadEnv" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /models/huggingface}
{{- with .Values.huggingFaceTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end -}}
